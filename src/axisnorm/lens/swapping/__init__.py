"""What a module computes, shown by probes, and the class that computes the same by this library."""
