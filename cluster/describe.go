package cluster

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/lockstep-ml/lockstep/internal/redact"
)

// Value is one value that was read: the name of an environment variable, flag or file, and its content.
type Value struct{ Name, Value string }

// Claim is the information of a source that was not selected.
type Claim struct {
	Source          string
	Worker, Workers int     // -1 and 0: it has no index for this process
	Values          []Value // that it was read from
	Note            string  // its relation to the selected source
}

// hidden is printed for secret values.
const hidden = "(set, not shown)"

var secretName = regexp.MustCompile(`(?i)secret|token|key|passw`)

// String returns NAME=value, with a long value truncated. Values that may be secret are omitted, see
// [Value.Shown].
func (v Value) String() string {
	const bytesMax = 200
	value := v.Shown()
	if len(value) > bytesMax {
		value = strings.ToValidUTF8(value[:bytesMax], "") + "…"
	}
	return v.Name + "=" + value
}

// Shown returns the value for display, on one line: a placeholder if its name is that of a secret, and
// addresses without user names and passwords.
func (v Value) Shown() string {
	if secretName.MatchString(v.Name) {
		return hidden
	}
	return visible(strings.ToValidUTF8(redact.URL(v.Value), "?"))
}

// visible keeps a value on its line.
func visible(s string) string {
	return strings.Map(func(c rune) rune {
		if c < ' ' || c == 0x7f {
			return ' '
		}
		return c
	}, s)
}

func valuesText(values []Value) string {
	if len(values) == 0 {
		return "nothing"
	}
	var words []string
	for _, v := range values {
		words = append(words, v.String())
	}
	return strings.Join(words, " ")
}

// Describe returns several lines: the job, the selected source, each value that was read, and the information
// of the other sources. Secrets are not shown.
//
//	worker 1 of 4, by Slurm
//	  on this host  worker 1 of 2
//	  job           slurm-4711.0
//	  store         tcp://n01:61447, which worker 0 opens
//	  read          SLURM_PROCID=1
//	                SLURM_STEP_NUM_TASKS=4
//	  also found    Kubernetes Job: is incomplete and was not queried
func (j *Job) Describe() string {
	var b strings.Builder
	row := func(name, text string) {
		fmt.Fprintf(&b, "  %-12s  %s\n", name, strings.ReplaceAll(text, "\n", "\n                "))
	}
	b.WriteString(j.String() + "\n")
	if j.Source == noSource && len(j.Values) == 0 && len(j.Beside) == 0 {
		return b.String()
	}
	if j.Task.Type != "" && j.Task.Type != Worker {
		row("task", j.Task.String())
	}
	if j.LocalWorkers > 0 {
		row("on this host", fmt.Sprintf("worker %d of %d", j.LocalWorker, j.LocalWorkers))
	}
	if j.ID != "" {
		row("job", j.ID)
	}
	if j.Epoch > 0 {
		row("restarts", fmt.Sprint(j.Epoch))
	}
	if text := j.storeText(); text != "" {
		row("store", text)
	}
	name := "read"
	for _, v := range j.Values {
		row(name, v.String())
		name = ""
	}
	name = "also found"
	for _, c := range j.Beside {
		row(name, c.String())
		if len(c.Values) > 0 {
			row("", "  "+valuesText(c.Values))
		}
		name = ""
	}
	return b.String()
}

func (j *Job) storeText() string {
	switch {
	case j.Store == "" && j.Workers == 1:
		return ""
	case j.Store == "":
		return "not known: " + j.NoStore
	case j.Store == StorePMI:
		return "a free port of worker 0, whose address the launcher passes on (PMI)"
	case j.Hosted:
		return redact.URL(j.Store)
	}
	return redact.URL(j.Store) + ", which worker 0 opens"
}

// String returns "Slurm: worker 0 of 2; mpirun was started inside it".
func (c Claim) String() string {
	if c.Workers == 0 {
		return c.Source + ": " + c.Note
	}
	return fmt.Sprintf("%s: worker %d of %d; %s", c.Source, c.Worker, c.Workers, c.Note)
}
