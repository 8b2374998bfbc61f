// The namespace of the operators in torch.ops: what specdec_kernels/_ops.py says, or what the build
// was given.
#pragma once
#include <torch/csrc/stable/library.h>

#ifndef SPECDEC_NAMESPACE
#define SPECDEC_NAMESPACE specdec_kernels
#endif
