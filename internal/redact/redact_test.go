package redact

import "testing"

func TestURL(t *testing.T) {
	for in, want := range map[string]string{
		"tcp://host:29400":                    "tcp://host:29400",
		"file:///home/me@work/store":          "file:///home/me@work/store",
		"etcd://root:pa:ss@host:2379/prefix":  "etcd://…@host:2379/prefix",
		"root:pass@host:2379":                 "…@host:2379",
		"etcds://a:1,root:p@s,s@b:2/x":        "etcds://…@b:2/x",
		"https://me:one@a:1 https://me:2@b:2": "https://…@a:1 https://…@b:2",
		"prterun-n1-4711@1":                   "prterun-n1-4711@1",
		"tcp://me@host:1":                     "tcp://…@host:1",
		"host1:2379,host2:2379":               "host1:2379,host2:2379",
		"":                                    "",
		"etcd://root:pa/ss@host:2379/prefix":  "etcd://…@host:2379/prefix",
		"root:pa/s:/@s@host:2379":             "…@host:2379",
		"root:p://a@host:1":                   "…@host:1",
		"etcd://a:1,root:p/s,s/@b:2/x":        "etcd://…@b:2/x",
		"file:///a@b,etcd://root:p/s@h:1":     "file:///a@b,etcd://…@h:1",
		"://root:p/s@h:1":                     "://…@h:1",
	} {
		if got := URL(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}
