"""Speed: our kernels, the peers and the memory ceilings, side by side (specs/gates/gate7.md)."""
