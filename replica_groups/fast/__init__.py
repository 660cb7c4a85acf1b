"""The fast path: whole replicas in one process, one after the other, with nothing serialised. It makes the tables."""
