// What the library was built from and for, as JSON. It is read out of the library file: by llmkernels/_library.py, also
// when the library does not load, and by setup.py when it reuses one.
#include "build_info.h"  // written by setup.py

extern "C" const char llmkernels_build_info[] = LLMK_BUILD_INFO;
