// For headers that name the driver's types only.
#pragma once

struct CUtensorMap {};
