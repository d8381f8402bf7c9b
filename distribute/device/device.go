// Package device has TensorFlow's names of devices and the rules about lists of them: which belong to one worker, and
// which are nearby. It opens no device.
package device

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/distribute/internal/kinds"
)

// Spec is a device name in TensorFlow's form. Make one with [Parse] or [Canonical].
type Spec struct {
	Job     string // "" if not given
	Replica int    // -1 if not given
	Task    int    // -1 if not given
	Kind    string // "CPU", "GPU", "TPU" or another kind of the engine; "" if not given
	Index   int    // among devices of the same kind; -1 if not given
}

// CPU returns a logical CPU device of this process. CPU(0) completes partial device strings.
func CPU(index int) Spec { return Spec{Job: "localhost", Kind: "CPU", Index: index} }

// Parse parses a device string (TensorFlow's DeviceSpec.from_string). It accepts short forms such as "CPU:0",
// "/gpu:1" or "cpu", and any part of the full form "/job:worker/replica:0/task:0/device:CPU:1". "*" leaves an index
// open. Short forms exist for CPU, GPU and TPU; other kinds need "/device:KIND:0".
func Parse(s string) (Spec, error) {
	d := Spec{Replica: -1, Task: -1, Index: -1}
	bad := func(format string, args ...any) (Spec, error) {
		return Spec{}, invalid("Parse", format, args...)
	}
	for _, part := range strings.Split(s, "/") {
		fields := strings.Split(part, ":")
		key := fields[0]
		switch {
		case part == "":
		case key == "job" && len(fields) == 2 && fields[1] != "":
			d.Job = fields[1]
		case (key == "replica" || key == "task") && len(fields) == 2:
			n, err := parseIndex(fields[1])
			if err != nil {
				return bad("%s in the device spec '%s': %w", key, s, err)
			}
			if key == "replica" {
				d.Replica = n
			} else {
				d.Task = n
			}
		case key == "device" && len(fields) == 3, isDeviceKind(key) && len(fields) <= 2:
			if d.Kind != "" {
				return bad("multiple device types are not allowed while parsing the device spec: '%s'", s)
			}
			if key == "device" {
				fields = fields[1:]
			}
			if !isIdentifier(fields[0]) {
				return bad("'%s' in the device spec '%s' is not a device type: want a name such as CPU, GPU or TPU", fields[0], s)
			}
			d.Kind = strings.ToUpper(fields[0])
			if len(fields) == 2 {
				n, err := parseIndex(fields[1])
				if err != nil {
					return bad("device index in the device spec '%s': %w", s, err)
				}
				d.Index = n
			}
		default:
			return bad("unknown attribute '%s' is encountered while parsing the device spec: '%s'. Want a form such as CPU:0, "+
				"/gpu:1 or /job:localhost/replica:0/task:0/device:CPU:0", key, s)
		}
	}
	return d, nil
}

// Canonical parses s (TensorFlow's device_util.canonicalize). Missing parts are taken from defaults, device
// strings in order of precedence, and then from /job:localhost/replica:0/task:0/device:CPU:0.
func Canonical(s string, defaults ...string) (Spec, error) {
	d, err := Parse(s)
	if err != nil {
		return Spec{}, err
	}
	for _, def := range defaults {
		f, err := Parse(def)
		if err != nil {
			return Spec{}, err
		}
		d = d.fill(f)
	}
	return d.fill(CPU(0)), nil
}

// String returns the parts that are given, in TensorFlow's full form.
func (d Spec) String() string {
	var b strings.Builder
	if d.Job != "" {
		b.WriteString("/job:" + d.Job)
	}
	if d.Replica >= 0 {
		b.WriteString("/replica:" + strconv.Itoa(d.Replica))
	}
	if d.Task >= 0 {
		b.WriteString("/task:" + strconv.Itoa(d.Task))
	}
	if d.Kind != "" {
		b.WriteString("/device:" + d.Kind + ":")
		if d.Index >= 0 {
			b.WriteString(strconv.Itoa(d.Index))
		} else {
			b.WriteByte('*')
		}
	}
	return b.String()
}

// Short returns the kind and the index: "CPU:0".
func (d Spec) Short() string { return fmt.Sprintf("%s:%d", d.Kind, max(d.Index, 0)) }

// Local reports whether the device belongs to this process.
func (d Spec) Local() bool { return d.Job == "localhost" && d.Task == 0 }

func (d Spec) fill(f Spec) Spec {
	if d.Job == "" {
		d.Job = f.Job
	}
	if d.Replica < 0 {
		d.Replica = f.Replica
	}
	if d.Task < 0 {
		d.Task = f.Task
	}
	if d.Kind == "" {
		d.Kind = f.Kind
	}
	if d.Index < 0 {
		d.Index = f.Index
	}
	return d
}

func parseIndex(s string) (int, error) {
	if s == "*" {
		return -1, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 || strings.HasPrefix(s, "+") {
		return 0, fmt.Errorf("'%s' is not an index", s)
	}
	return n, nil
}

// isDeviceKind reports whether s is a kind that has a short form.
func isDeviceKind(s string) bool {
	return strings.EqualFold(s, "CPU") || strings.EqualFold(s, "GPU") || strings.EqualFold(s, "TPU")
}

// isIdentifier reports whether s is a letter, followed by letters, digits and underscores.
func isIdentifier(s string) bool {
	for i, r := range s {
		letter := 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z'
		if !letter && (i == 0 || r != '_' && (r < '0' || r > '9')) {
			return false
		}
	}
	return s != ""
}

func invalid(op, format string, args ...any) error {
	return kinds.OpErrorf("device."+op, kinds.Invalid, format, args...)
}
