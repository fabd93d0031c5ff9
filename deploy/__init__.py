"""Ray Serve deployments and the application that binds them."""
