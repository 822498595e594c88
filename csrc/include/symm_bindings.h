// The symmetric collectives' part of the Python module; called once by bindings.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace megalite {

void bind_symm(pybind11::module_& m);

}  // namespace megalite
