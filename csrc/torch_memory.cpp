#include "torch_memory.h"

#include <atomic>

namespace torch_door {

namespace nb = nanobind;
using memory::State;

// Never freed: at the end of the process Python may be gone first.
memory::Pool<Storage> &storages = *new memory::Pool<Storage>;

namespace {

// Set once by connect_storages(), under the GIL.
PyObject *make_tensor;  // (base, sizes, strides, offset) -> a tensor over the base's memory
PyObject *make_base;    // (storage, dtype) -> a tensor over it without elements
PyObject *count;        // (number of a storage) -> how many hold it
Question size_of, address_of, resizable;

// Who holds a free block: the Python object and the base; and how many references that object has. Its
// other side in torch is one of them in some versions.
constexpr int64_t FREE_HOLDERS = 2;
int64_t free_references;

// The number that torch answered; -1 where it refused.
int64_t number(PyObject *answer) {
  const int64_t result = answer ? (int64_t)PyLong_AsUnsignedLongLong(answer) : -1;
  Py_XDECREF(answer);
  PyErr_Clear();
  return result;
}

// connect_storages({name: object}) -> bool: what is asked and called here, by name
PyObject *connect_storages(PyObject *, PyObject *given) {
  PyObject *new_storage = nullptr, *dtype = nullptr;
  if (!take(given, {{"make_tensor", &make_tensor},
                    {"make_base", &make_base},
                    {"count", &count},
                    {"size", &size_of.function},
                    {"address", &address_of.function},
                    {"resizable", &resizable.function},
                    {"new_storage", &new_storage},
                    {"dtype", &dtype}}))
    return nullptr;
  const nb::object making = nb::steal(new_storage), type = nb::steal(dtype);
  nb::object storage = nb::steal(PyObject_CallNoArgs(making.ptr()));
  if (!storage || !size_of.prepare(storage.ptr()) || !address_of.prepare(storage.ptr()) ||
      !resizable.prepare(storage.ptr()))
    return nullptr;
  const auto block = Storage::make(storage.ptr(), type.ptr());
  if (!block) return nullptr;
  storage.reset();
  return PyBool_FromLong(block->set_free());
}

// keep_storage(storage, dtype) -> None: for other tensors, when it is free
PyObject *keep_storage(PyObject *, PyObject *const *args, Py_ssize_t args_count) {
  if (args_count != 2) {
    PyErr_SetString(PyExc_TypeError, "keep_storage takes a storage and a type");
    return nullptr;
  }
  const auto block = Storage::make(args[0], args[1]);
  if (!block) return nullptr;
  storages.keep(block, number(size_of.ask(args[0])));
  Py_RETURN_NONE;
}

// reuse(bytes, (sizes, strides, dtype)) -> a tensor in memory that was used before, or None
PyObject *reuse_storage(PyObject *, PyObject *const *args, Py_ssize_t args_count) {
  if (args_count != 2 || !PyTuple_Check(args[1]) || PyTuple_Size(args[1]) != 3) {
    PyErr_SetString(PyExc_TypeError, "reuse takes a number of bytes and a layout");
    return nullptr;
  }
  const int64_t bytes = PyLong_AsLongLong(args[0]);
  return PyErr_Occurred() ? nullptr : reuse(bytes, args[1]);
}

PyMethodDef methods[] = {
    {"connect_storages", (PyCFunction)connect_storages, METH_O, nullptr},
    {"keep_storage", (PyCFunction)(void *)keep_storage, METH_FASTCALL, nullptr},
    {"reuse", (PyCFunction)(void *)reuse_storage, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

std::shared_ptr<Storage> Storage::make(PyObject *storage, PyObject *dtype) {
  const auto block = std::make_shared<Storage>();
  PyObject *const number_of_it = PyObject_GetAttrString(storage, "_cdata");
  PyObject *const counted = number_of_it ? PyTuple_Pack(1, number_of_it) : nullptr;
  Py_XDECREF(number_of_it);
  if (!counted) return nullptr;
  block->storage_ = nb::borrow(storage);
  block->counted_ = nb::steal(counted);
  block->address_ = number(address_of.ask(storage));
  return block->set_dtype(dtype) ? block : nullptr;
}

int64_t Storage::references() const { return memory::references(storage_.ptr()); }

int64_t Storage::holders() const { return number(PyObject_Call(count, counted_.ptr(), nullptr)); }

bool Storage::set_free() const {
  free_references = references();
  return holders() == FREE_HOLDERS && free_references <= 2;
}

State Storage::look(int64_t bytes) const {
  if (references() != free_references || holders() != FREE_HOLDERS) return memory::HELD;
  // Who let go of it last may have read or written it without the GIL: that comes before.
  std::atomic_thread_fence(std::memory_order_acquire);
  // Resized, moved to shared memory, or copied because a lazy clone was written: it is elsewhere.
  // Seen by NumPy: torch never resizes it again.
  const bool same = number(size_of.ask(storage_.ptr())) == bytes &&
                    number(address_of.ask(storage_.ptr())) == address_ &&
                    number(resizable.ask(storage_.ptr())) == 1;
  return same ? memory::FREE : memory::SPOILED;
}

bool Storage::set_dtype(PyObject *dtype) {
  if (dtype_.ptr() == dtype) return true;
  PyObject *const base = PyObject_CallFunctionObjArgs(make_base, storage_.ptr(), dtype, nullptr);
  if (!base) return false;
  base_ = nb::steal(base);
  dtype_ = nb::borrow(dtype);
  return true;
}

PyObject *Storage::tensor(PyObject *layout) {
  if (layout_.ptr() != layout) {
    static PyObject *const zero = PyLong_FromLong(0);
    if (!set_dtype(PyTuple_GetItem(layout, 2))) return nullptr;
    PyObject *const arguments = PyTuple_Pack(4, base_.ptr(), PyTuple_GetItem(layout, 0),
                                             PyTuple_GetItem(layout, 1), zero);
    if (!arguments) return nullptr;
    arguments_ = nb::steal(arguments);
    layout_ = nb::borrow(layout);
  }
  return PyObject_Call(make_tensor, arguments_.ptr(), nullptr);
}

PyObject *reuse(int64_t bytes, PyObject *layout) {
  const std::shared_ptr<Storage> block = storages.take(bytes);
  if (!block) Py_RETURN_NONE;
  return block->tensor(layout);
}

void add_memory_to(PyObject *module) {
  if (PyModule_AddFunctions(module, methods)) throw nb::python_error();
}

}  // namespace torch_door
