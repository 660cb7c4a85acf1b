"""Everything that crosses between members, but for raw tensor frames: the .proto, and the code generated from it."""
