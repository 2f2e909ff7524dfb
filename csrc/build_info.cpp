// What the library was built from and for, as JSON. llmkernels/_library.py reads it from the library file, even if the
// library does not load; setup.py reads it to see whether it can reuse a library.
#include "build_info.h"  // written by setup.py

extern "C" const char llmkernels_build_info[] = LLMK_BUILD_INFO;
