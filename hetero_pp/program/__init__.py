"""The program: the commands, launching a run, reporting what it does, and the experiments of the papers."""
