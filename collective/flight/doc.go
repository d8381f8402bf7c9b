// Package flight holds what every rank remembers of its last calls, and finds out of the records of all ranks where they part.
//
// A rank of package collective keeps its last calls at all times: that costs a few nanoseconds a call. When a job fails, each worker
// writes them into a file of its own, flight-<epoch>-<worker>.jsonl ([Write]). [Read] reads those of a folder, and [Find]
// merges them by communicator and number of the call: which call is the last that all ranks have completed, what each of them did
// then, who has not come, who called something else, who is slow.
//
//	files, err := flight.Read(folder)
//	report := flight.Find(files)
//	report.Print(os.Stdout)
//
// Calls are put side by side by their numbers, never by their times: clocks of different hosts differ. Times are only ever compared
// with others of the same rank.
package flight
