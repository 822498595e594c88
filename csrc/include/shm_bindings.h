// The shared memory parts of the Python module; called once by bindings.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace megalite {

void bind_shm(pybind11::module_& m);

}  // namespace megalite
