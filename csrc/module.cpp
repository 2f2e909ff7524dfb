// The Python module _C: information for Python that is not an op. No torch header.
#include <pybind11/pybind11.h>

#include <string>

#include "kernels/norm/plan.h"
#include "record.h"

namespace py = pybind11;

extern "C" const char llmkernels_build_info[];

namespace {

py::dict build_info() { return py::module_::import("json").attr("loads")(&llmkernels_build_info[0]); }

void check(bool valid, const char* argument, const char* expected, int64_t received) {
  if (valid) return;
  throw py::value_error(std::string("norm_plan: ") + argument + " must be " + expected + ", got " +
                        std::to_string(received));
}

py::dict norm_plan(int64_t cols, int64_t element_bytes, bool vector, bool residual, bool few_rows, bool centered) {
  check(cols > 0, "cols", "positive", cols);
  check(element_bytes == 2 || element_bytes == 4, "element_bytes", "2 or 4", element_bytes);
  const auto plan =
      llmk::kernels::plan_norm(cols, static_cast<size_t>(element_bytes), vector, residual, few_rows, centered);
  return py::dict(py::arg("width") = plan.width, py::arg("vectors") = plan.vectors,
                  py::arg("threads_per_row") = plan.threads_per_row, py::arg("rows_per_block") = plan.rows_per_block);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Build information and launch plans of llmkernels, and the guard of its decode step.";
  module.def("build_info", &build_info, "What the library beside this module was built from and for.");
  module.def(
      "norm_plan", &norm_plan, py::arg("cols"), py::arg("element_bytes"), py::arg("vector") = true,
      py::arg("residual") = false, py::arg("few_rows") = false, py::arg("centered") = false,
      "How one row of an RMSNorm, or centered of a LayerNorm, is spread over threads: elements per access, vectors per "
      "thread (0: the row is read twice), threads per row, rows per block. See csrc/kernels/norm/plan.h. Raises: "
      "ValueError for a number out of range.");

  py::class_<llmk::Record>(module, "Record",
                           "What a model was when a step was made for it, and whether it still is. See csrc/record.h.")
      .def(py::init<const py::capsule&, const py::list&, const py::list&, const py::list&, const py::list&,
                    const py::list&, const py::list&>(),
           py::kw_only(), py::arg("exchange"), py::arg("names"), py::arg("nodes"), py::arg("same"), py::arg("equal"),
           py::arg("tensors"), py::arg("held"))
      .def("holds", &llmk::Record::holds, py::arg("model"), "Whether all of it is as it was.")
      .def("memory", &llmk::Record::memory,
           "The storages of `held`, which keep the memory of all tensors alive, or None if one is not where it was.");
}
