"""The network: .proto, generated code, channels, servers and clients. The only place that imports grpc."""
