"""`hetero-pp doctor`: checks before a run or a join. Each file has the checks of one thing."""
