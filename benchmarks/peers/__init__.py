"""What we are compared with: other encoders, each in an environment whose pins do not bind ours."""
