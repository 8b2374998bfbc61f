// Checks of what the Python side has promised. User errors never get here: they are ValueErrors.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

// SPECDEC_CHECK(op, condition, message...): message says expected and got.
#define SPECDEC_CHECK(op, condition, ...) STD_TORCH_CHECK(condition, op, ": ", __VA_ARGS__)
