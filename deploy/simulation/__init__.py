"""The lanes of a cluster over simulated engines, on a virtual clock (``dspark simulate``)."""
