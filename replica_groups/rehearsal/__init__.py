"""Members of a rehearsal: real links, messages and rounds, while timed waits take the place of compute."""
