package main

import (
	"encoding/json"
	"io"
)

// writeJSON writes v as one line of JSON, the form of --format json that docs/json.md describes. One write: several
// workers may share a pipe.
func writeJSON(w io.Writer, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(text, '\n'))
	return err
}
