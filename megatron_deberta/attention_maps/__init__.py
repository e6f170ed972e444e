"""Attention maps of trained models: computation, picture, interactive page.

Source: He et al. 2021, arXiv:2006.03654, appendix, Figures 3 to 5.
"""
