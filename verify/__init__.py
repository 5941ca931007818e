"""Whether a build is exactly the trained model, loads where it claims to, and was made as it says."""
