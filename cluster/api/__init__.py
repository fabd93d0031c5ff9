"""The public gRPC interface, `dspark.v1`: the .proto and what protoc makes of it (`make proto`)."""
