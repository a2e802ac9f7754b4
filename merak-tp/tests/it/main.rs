//! Splitting models over the tensor axis.

mod errors; // what is refused, and in which words
mod models; // GPT-2 and Llama as each rank runs them
mod propagation; // one small graph per rule
mod support; // rewriting in one line, graphs as short text
