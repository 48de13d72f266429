"""The case `codec`, its methods to compare with, and its plots."""
