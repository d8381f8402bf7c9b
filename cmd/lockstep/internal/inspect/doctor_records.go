package inspect

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/collective/flight"
)

// diagnosis is the result of the records of one epoch of a job.
type diagnosis struct {
	Folder string          `json:"folder"`
	Root   *failure.Record `json:"root,omitempty"` // the failure that the others follow from
	*flight.Report
}

// explainRecords reads the records in a folder, prints the diagnosis, and writes it as a page into the file html unless
// that is empty. epoch -1 is the last epoch.
func explainRecords(out io.Writer, folder, format, html string, epoch int) error {
	files, err := flight.Read(folder)
	if err != nil && len(files) == 0 {
		return err
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "lockstep: skipped: %v\n", err)
	}
	if len(files) == 0 {
		return noFlights(folder)
	}
	if epoch < 0 {
		epoch = int(files[len(files)-1].Epoch)
	}
	var chosen []flight.File
	epochs := map[uint32]bool{}
	for _, f := range files {
		epochs[f.Epoch] = true
		if f.Epoch == uint32(epoch) {
			chosen = append(chosen, f)
		}
	}
	if len(chosen) == 0 {
		return fmt.Errorf("%s has no records of epoch %d: its last one is %d", folder, epoch, files[len(files)-1].Epoch)
	}
	for _, f := range chosen[1:] {
		if f.Job != chosen[0].Job {
			return fmt.Errorf("%s has records of two jobs, %q and %q, in one epoch: copy the records of one job into a "+
				"separate folder", folder, chosen[0].Job, f.Job)
		}
	}
	d := diagnosis{Folder: folder, Report: flight.Find(chosen)}
	failures, err := failure.Read(folder, uint32(epoch))
	if err != nil {
		fmt.Fprintf(os.Stderr, "lockstep: skipped: %v\n", err)
	}
	if found, ok := failure.Find(failures); ok {
		d.Root = &found.Root
		for _, m := range chosen[0].Members {
			if m.Worker == d.Root.Worker && d.Root.Host == "" { // the worker left no record of its host
				d.Root.Host, d.Root.PID = m.Host, m.PID
			}
		}
	}
	if html != "" {
		if err := writeRecordsPage(html, &d, chosen); err != nil {
			return fmt.Errorf("--html: %w", err)
		}
	}
	if format == "json" {
		return cli.WriteJSON(out, d)
	}
	return d.print(out, len(epochs))
}

func noFlights(folder string) error {
	if found, _ := filepath.Glob(filepath.Join(folder, "failure-*.json")); len(found) > 0 {
		return fmt.Errorf("%s has records of failures, but none of collectives (flight-*.jsonl): no worker had started one",
			folder)
	}
	return fmt.Errorf("%s has no records of collectives (flight-*.jsonl): is it the folder that LOCKSTEP_RECORDS named?",
		folder)
}

func (d *diagnosis) print(out io.Writer, epochs int) error {
	if epochs > 1 {
		if _, err := fmt.Fprintf(out, "the folder has records of %s; these are of epoch %d\n", cli.Count(epochs, "epoch"),
			d.Epoch); err != nil {
			return err
		}
	}
	if r := d.Root; r != nil {
		message, _, _ := strings.Cut(r.Message, "\n")
		if _, err := fmt.Fprintf(out, "worker %d failed first (host %s, pid %d), %s: %s\n", r.Worker, r.Host, r.PID, r.Kind,
			message); err != nil {
			return err
		}
	}
	return d.Print(out)
}
