//! Pipeline schedules as data: generate, validate, simulate, draw and run them
