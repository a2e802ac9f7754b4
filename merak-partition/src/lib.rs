//! Cuts a traced model into segments and balances them over pipeline stages, with a report of why
