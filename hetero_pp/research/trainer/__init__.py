"""The trainer of tables: whole replicas in one process with nothing serialised; `hetero-pp reproduce` uses it."""
