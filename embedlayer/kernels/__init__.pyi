from .kernel import kernels_disabled as kernels_disabled
