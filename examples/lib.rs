//! The numbered examples of this folder; each file's first comment says how to run it.
