//! Splitting models over the tensor and the sequence axis.

mod chains; // random chains of layers against one rank
mod differential; // GPT-2, GPT and Llama against one rank
mod errors; // what is refused, and in which words
mod models; // GPT-2 and Llama as each rank runs them
mod overlap; // halves of a microbatch between sums
mod propagation; // one small graph per rule
mod run; // forward and backward on threads
mod sequence; // slices of the sequence between regions
mod slices; // slices by name, convolutions, chosen layers
mod support; // rewriting in one line, graphs as short text
mod traffic; // the collectives of a layer against closed forms
mod ulysses; // the sequence axis against one rank
mod vocab; // a split vocabulary against whole logits
