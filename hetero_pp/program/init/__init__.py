"""`hetero-pp init`: writes a first YAML from five answers."""
