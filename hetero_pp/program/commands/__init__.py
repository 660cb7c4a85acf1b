"""The commands of `hetero-pp`. Heavy modules are imported inside the functions, so that help is fast."""
