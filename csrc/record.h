// What a model was when a step was made for it, in flat lists, and whether it still is. hf/step/guard.py fills and asks
// it.
//
//   names       what dicts and classes have under a name: functions that the forwards call
//   nodes       the dicts and lists to be found from the model on: of its modules, their parameters, children and hooks
//   attributes  values in these dicts
//   tensors     tensors in these dicts, by address, dtype, shape and strides
//
// One pass of lookups, without a call of Python code where nothing has changed. Nothing of the model is kept alive:
// each dict is found anew, and a tensor is known by where it is.
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace llmk {

namespace py = pybind11;

// As much of DLPack's ABI (github.com/dmlc/dlpack, major version 1) as it takes to look at a tensor without a call of
// Python and without torch's headers. torch has it from 2.10 on.
namespace dlpack {

struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t dtype_code, dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major, minor;
  void* previous;
  void *allocate, *from_object, *to_object;
  int (*look)(void* object, Tensor* out);  // owns nothing: shape and strides are those of the object
  void* current_stream;
};

inline const ExchangeApi& exchange_api(const py::capsule& capsule) {
  auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw py::error_already_set();
  if (api->major != 1 || api->look == nullptr) {
    throw py::value_error("Record: exchange must be of DLPack 1 and able to look at tensors, got version " +
                          std::to_string(api->major) + "." + std::to_string(api->minor));
  }
  return *api;
}

}  // namespace dlpack

class Record {
 public:
  // names: (owner, name, value): of a dict its item, of anything else its attribute
  // nodes: (parent, name, type, size): the item of an earlier node, by name or index, or with parent -1 the model,
  // which
  //        comes first; a dict, a list, or an object with a dict, of this size
  // same, equal: (node, name, value): this very object, or an equal one
  // tensors: (node, name, tensor or None)
  // held: tensors with whose storages all memory of the model stays where it is
  // Of a dict, None stands for an item that is not there, too.
  Record(const py::capsule& exchange, const py::list& names, const py::list& nodes, const py::list& same,
         const py::list& equal, const py::list& tensors, const py::list& held)
      : exchange_(dlpack::exchange_api(exchange)) {
    for (const py::handle entry : names) names_.push_back(entry.cast<Name>());
    for (const py::handle entry : nodes) {
      const auto [parent, name, type, size] = entry.cast<std::tuple<int64_t, py::object, py::type, int64_t>>();
      check_node(parent, nodes_.empty() ? -1 : 0);
      const bool has_index = py::isinstance<py::int_>(name);
      nodes_.push_back(
          {parent, has_index ? py::str() : interned(name), has_index ? name.cast<int64_t>() : -1, type, size});
    }
    for (const auto& [entries, by_value] : {std::pair{&same, false}, std::pair{&equal, true}}) {
      for (const py::handle entry : *entries) {
        const auto [node, name, value] = entry.cast<std::tuple<int64_t, py::str, py::object>>();
        check_node(node, 0);
        attributes_.push_back({node, interned(name), value, by_value});
      }
    }
    for (const py::handle entry : tensors) {
      const auto [node, name, tensor] = entry.cast<std::tuple<int64_t, py::str, py::object>>();
      check_node(node, 0);
      tensors_.push_back(look(node, interned(name), tensor));
    }
    for (const py::handle tensor : held) {
      held_.push_back({py::weakref(tensor), looked_at(tensor.ptr()).data});
    }
  }

  // Whether all of it is as it was.
  bool holds(const py::object& model) const {
    for (const Name& name : names_) {
      if (!is_same(name)) return false;
    }
    // Borrowed references, good for as long as no code of Python's runs: comparisons that may call some come last.
    std::vector<PyObject*> found;
    found.reserve(nodes_.size());
    for (const Node& node : nodes_) {
      PyObject* value = node.parent < 0 ? model.ptr() : child(found[node.parent], node);
      if (value == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(value)) != node.type.ptr()) return false;
      PyObject* members = value;
      if (!PyDict_Check(value) && !PyList_Check(value)) {
        members = PyObject_GenericGetDict(value, nullptr);
        if (members == nullptr) throw py::error_already_set();
        Py_DECREF(members);  // the object has it
      }
      if (size_of(members) != node.size) return false;
      found.push_back(members);
    }
    std::vector<std::pair<py::object, const Attribute*>> others;
    for (const Attribute& attribute : attributes_) {
      PyObject* value = item(found[attribute.node], attribute.name);
      if (value == nullptr) value = Py_None;
      if (value == attribute.value.ptr()) continue;
      if (!attribute.by_value) return false;
      others.emplace_back(py::reinterpret_borrow<py::object>(value), &attribute);
    }
    for (const Known& known : tensors_) {
      PyObject* value = item(found[known.node], known.name);
      if (value != known.object || (value != Py_None && !is_unchanged(value, known))) return false;
    }
    for (const auto& [value, attribute] : others) {
      if (!value.equal(attribute->value)) return false;
    }
    return true;
  }

  // What keeps the memory of all tensors alive, or None if one of them is not where it was.
  py::object memory() const {
    py::list storages(held_.size());
    for (size_t index = 0; index < held_.size(); ++index) {
      const auto& [reference, data] = held_[index];
      const py::object tensor = target(reference);
      dlpack::Tensor now{};
      if (tensor.is_none()) return py::none();
      if (exchange_.look(tensor.ptr(), &now) != 0) PyErr_Clear();
      if (now.data != data) return py::none();
      PyObject* storage = PyObject_CallMethodNoArgs(tensor.ptr(), storage_of_.ptr());
      if (storage == nullptr) throw py::error_already_set();
      PyList_SET_ITEM(storages.ptr(), static_cast<Py_ssize_t>(index), storage);
    }
    return storages;
  }

 private:
  using Name = std::tuple<py::object, py::str, py::object>;

  struct Node {
    int64_t parent;
    py::str name;
    int64_t index;  // of a list
    py::type type;
    int64_t size;
  };

  struct Attribute {
    int64_t node;
    py::str name;
    py::object value;
    bool by_value;
  };

  struct Known {
    int64_t node;
    py::str name;
    const PyObject* object;  // never followed: it may be another one by now, which is where this was
    py::type type;
    dlpack::Tensor layout;         // but for shape and strides,
    std::vector<int64_t> extents;  // which are here
  };

  struct Held {
    py::weakref tensor;
    const void* data;
  };

  void check_node(int64_t node, int64_t least) const {
    const auto count = static_cast<int64_t>(nodes_.size());
    if (node >= least && node < count) return;
    throw py::index_error("Record: a node must be one of the " + std::to_string(count) + " before, got " +
                          std::to_string(node));
  }

  static py::str interned(py::str name) {
    PyObject* text = name.release().ptr();
    PyUnicode_InternInPlace(&text);
    return py::reinterpret_steal<py::str>(text);
  }

  static PyObject* item(PyObject* dict, const py::str& name) {
    PyObject* value = PyDict_GetItemWithError(dict, name.ptr());
    if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  static PyObject* child(PyObject* parent, const Node& node) {
    if (!PyList_Check(parent)) return item(parent, node.name);
    const bool is_there = node.index >= 0 && node.index < PyList_GET_SIZE(parent);
    return is_there ? PyList_GET_ITEM(parent, node.index) : nullptr;
  }

  static int64_t size_of(PyObject* members) {
    return PyList_Check(members) ? PyList_GET_SIZE(members) : PyDict_GET_SIZE(members);
  }

  static bool is_same(const Name& entry) {
    const auto& [owner, name, expected] = entry;
    if (PyDict_Check(owner.ptr())) {
      const PyObject* value = item(owner.ptr(), name);
      return (value == nullptr ? Py_None : value) == expected.ptr();
    }
    PyObject* value = PyObject_GetAttr(owner.ptr(), name.ptr());
    if (value == nullptr) {
      if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
      PyErr_Clear();
      return false;
    }
    Py_DECREF(value);
    return value == expected.ptr();
  }

  dlpack::Tensor looked_at(PyObject* tensor) const {
    dlpack::Tensor layout{};
    if (exchange_.look(tensor, &layout) != 0) {
      PyErr_Clear();
      throw py::buffer_error("Record: a tensor must have ordinary memory");
    }
    return layout;
  }

  Known look(int64_t node, const py::str& name, const py::object& tensor) const {
    Known known{node, name, tensor.ptr(), py::type::of(tensor), {}, {}};
    if (tensor.is_none()) return known;
    known.layout = looked_at(tensor.ptr());
    const auto& [shape, strides, ndim] = std::tie(known.layout.shape, known.layout.strides, known.layout.ndim);
    known.extents.assign(shape, shape + ndim);
    known.extents.insert(known.extents.end(), strides, strides + ndim);
    known.layout.shape = known.layout.strides = nullptr;
    return known;
  }

  // Not the values: a weight that is written in place is read as it is.
  bool is_unchanged(PyObject* tensor, const Known& known) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != known.type.ptr()) return false;
    dlpack::Tensor now{};
    if (exchange_.look(tensor, &now) != 0) {  // it has no memory any more
      PyErr_Clear();
      return false;
    }
    const dlpack::Tensor& then = known.layout;
    const size_t bytes = sizeof(int64_t) * static_cast<size_t>(then.ndim);
    return now.data == then.data && now.byte_offset == then.byte_offset && now.ndim == then.ndim &&
           now.dtype_code == then.dtype_code && now.dtype_bits == then.dtype_bits &&
           now.dtype_lanes == then.dtype_lanes && now.device_type == then.device_type &&
           now.device_id == then.device_id &&
           (bytes == 0 || (std::memcmp(now.shape, known.extents.data(), bytes) == 0 &&
                           std::memcmp(now.strides, known.extents.data() + then.ndim, bytes) == 0));
  }

  static py::object target(const py::weakref& reference) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* object = nullptr;
    if (PyWeakref_GetRef(reference.ptr(), &object) < 0) throw py::error_already_set();
    return object == nullptr ? py::none() : py::reinterpret_steal<py::object>(object);
#else
    return py::reinterpret_borrow<py::object>(PyWeakref_GetObject(reference.ptr()));
#endif
  }

  const dlpack::ExchangeApi& exchange_;
  std::vector<Name> names_;
  std::vector<Node> nodes_;
  std::vector<Attribute> attributes_;
  std::vector<Known> tensors_;
  std::vector<Held> held_;
  py::str storage_of_ = interned("untyped_storage");
};

}  // namespace llmk
