"""Against the real libraries of other projects; see `make test-interop`."""
