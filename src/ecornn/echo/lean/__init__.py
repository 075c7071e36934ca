"""Functions that keep less for the backward pass than torch's, and give the same to the last bit.

A compiled region is planned from its graph; the rest of the model runs as it is written, and keeps
what torch's functions keep. While such a model is called, those of them that hold far more than
they need are replaced here, without a change to the model.
"""
