// Package flight is the flight recorder's format: the last calls of every rank, and the search for the point
// where the ranks diverge.
//
// A rank of package collective always records its last calls; that costs a few nanoseconds per call. When a
// job fails, each worker writes them to a file, flight-<epoch>-<worker>.jsonl ([Write]). [Read] reads the
// files of a folder, and [Find] merges them by communicator and call number: which call is the last that all
// ranks have completed, what each rank did then, which ranks have not entered the call, which ranks made a
// different call, and which rank is slow.
//
//	files, err := flight.Read(folder)
//	report := flight.Find(files)
//	report.Print(os.Stdout)
//
// Calls are matched by their numbers, never by their times, because the clocks of hosts differ. Times are
// compared only with other times of the same rank.
package flight
