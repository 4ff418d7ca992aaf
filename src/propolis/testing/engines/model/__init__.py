"""The contract as a program, which engines are compared with."""
