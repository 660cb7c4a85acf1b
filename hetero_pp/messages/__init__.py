"""Everything that crosses between members: the .proto and code generated from it, stubs for hetero_pp.rpc among it."""
