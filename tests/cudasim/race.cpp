#include "tests/cudasim/engine.h"

namespace cudasim
{

void race_begin(const kernel_launch &) {}

} // namespace cudasim
