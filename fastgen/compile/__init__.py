"""Everything that runs on a device: ops and their kernels, how they are built, launched and captured."""
