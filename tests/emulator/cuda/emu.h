// Everything a generated kernel needs in place of the CUDA and TileLang headers.
#pragma once
#include "async_copy.h"
#include "cuda_math.h"
#include "simt.h"
#include "tensor_core.h"
#include "tl.h"
#include "types.h"
