#include "binding.h"

#include <algorithm>
#include <cstdint>

#include "overlap.h"

namespace llmk {
namespace {

std::string device(const Tensor& tensor) {
  if (is_meta(tensor)) return "meta";
  return tensor.is_cuda() ? "cuda:" + std::to_string(tensor.get_device_index()) : "cpu";
}

// The memory of an argument.
struct Span {
  const Argument* argument;
  uintptr_t begin, end;
};

void check_disjoint(const char* op, const Argument& a, const Argument& b) {
  const Argument& written = b.access == Access::kWrite ? b : a;
  LLMK_CHECK(!overlap(*a, *b), op, written.name, " must not share memory with ", (&written == &a ? b : a).name,
             ", as it is written to");
}

void check_writes(const char* op, const Argument* arguments, size_t count) {
  std::vector<Span> spans;
  for (const Argument* argument = arguments; argument != arguments + count; ++argument) {
    if (!*argument || (*argument)->numel() == 0) continue;
    const Tensor& tensor = **argument;
    LLMK_CHECK(argument->access == Access::kRead || !overlaps_itself(tensor), op, argument->name,
               " must not overlap itself, as it is written to, got shape ", shape(tensor), " with strides ",
               text(tensor.strides()));
    if (is_meta(tensor)) continue;  // it has no address
    const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    spans.push_back({argument, begin, begin + extent_bytes(tensor)});
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t i = 0; i < spans.size(); ++i) {
    for (size_t j = i + 1; j < spans.size() && spans[j].begin < spans[i].end; ++j) {
      const auto [first, second] = std::minmax(spans[i].argument, spans[j].argument);
      if (first->access == Access::kWrite || second->access == Access::kWrite) check_disjoint(op, *first, *second);
    }
  }
}

}  // namespace

void check_tensors(const char* op, const Argument* arguments, size_t count) {
  const Argument& first = *arguments;
  for (const Argument* argument = arguments; argument != arguments + count; ++argument) {
    if (!*argument) continue;
    const Tensor& tensor = **argument;
    LLMK_CHECK(tensor.defined(), op, argument->name, " must be a tensor, got None");
    // The dispatcher does not see tensors without memory that are in an optional list.
    const bool is_cuda = tensor.is_cuda(), same = is_cuda == first->is_cuda() &&
                                                  tensor.get_device_index() == first->get_device_index() &&
                                                  (is_cuda || tensor.is_cpu() == first->is_cpu());
    LLMK_CHECK(same, op, argument->name, " must be on the device of ", first.name, ", ", device(*first), ", got ",
               device(tensor));
  }
  const auto written = [](const Argument& argument) { return argument && argument.access == Access::kWrite; };
  if (std::any_of(arguments, arguments + count, written)) check_writes(op, arguments, count);
}

}  // namespace llmk
