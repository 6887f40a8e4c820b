"""Every message between WavePP's processes, in one place: one module per plane."""
