"""What the kernels have to compute, in plain torch: any float dtype, any K and V, any device."""
