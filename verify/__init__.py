"""Whether a build is exactly the trained model, and loads where it claims to."""
