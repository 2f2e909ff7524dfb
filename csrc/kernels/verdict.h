// What routes (linear/route.h, attention/route.h) are made of.
#pragma once

namespace llmk::kernels::routing {

// Whether a kernel is taken, and why, or why not.
struct Verdict {
  bool taken;
  const char* reason;
};
inline Verdict take(const char* reason) { return {true, reason}; }
inline Verdict refuse(const char* reason) { return {false, reason}; }

}  // namespace llmk::kernels::routing
