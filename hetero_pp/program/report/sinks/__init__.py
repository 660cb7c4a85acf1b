"""Places that the scalars of a run go to, one file each. TensorBoard always gets them."""
