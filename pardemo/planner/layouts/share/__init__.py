"""What lies on one rank: its parameters, what is trained of them, what its layers keep of a token."""
