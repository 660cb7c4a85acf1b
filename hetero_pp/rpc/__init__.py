"""The network: channels, and servers and clients of the calls in messages.proto. The only place that imports grpc."""
